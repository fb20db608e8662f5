"""The GGUF format of llama.cpp: its header, the types of its tensors, and their names in other formats."""
