"""Tables, sentences, and the page: all that a reader sees."""
