"""The GGUF format of llama.cpp: its header, and the sizes of its types of tensors."""
