"""What models read: windows of text, pictures, batches, controls."""
