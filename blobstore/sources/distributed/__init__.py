"""Reads tensors that the processes of a training run saved in pieces, and assembles them.

``metadata`` and ``items`` read the folders of ``torch.distributed.checkpoint``, ``huggingface_shards``
the safetensors files of its Hugging Face writer; ``tiling`` and ``assembly`` work for both.
"""
