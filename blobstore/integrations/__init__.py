"""Models from the store in inference servers, one module for each; only there is its library imported."""
