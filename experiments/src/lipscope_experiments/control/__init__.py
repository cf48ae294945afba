"""Control of training: what a monitor sees, and when."""
