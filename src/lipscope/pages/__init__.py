"""What a reader sees: tables, sentences, and the page."""
