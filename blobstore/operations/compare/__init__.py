"""Two models side by side: which layers differ, and by how much their values do."""
