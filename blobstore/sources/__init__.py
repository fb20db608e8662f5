"""Where tensors come from: files, folders and repositories, behind one protocol."""
