"""The safetensors format: headers, files and tensors, read strictly and written canonically."""
