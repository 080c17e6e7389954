"""Reading and writing files: checkpoints, GGUF, and replacing a file whole."""
