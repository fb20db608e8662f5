"""Folders as Meta publishes its Llamas: sharded ``consolidated.NN.pth`` files and ``params.json``."""
