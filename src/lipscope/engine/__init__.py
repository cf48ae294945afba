"""From a question to rows: the verbs, and what carries them out."""
