"""A checkpoint -> a Hugging Face model folder."""
