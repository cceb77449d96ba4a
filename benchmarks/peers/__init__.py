"""The same small Llama trained by functitan and by others, timed side by side."""
