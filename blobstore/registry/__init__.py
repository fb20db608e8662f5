"""OCI registries as remotes of a store: addresses, requests, credentials, and what registries return.

The layouts of models there are in ``layouts``.

Everything that a server sends is hostile input: it is bounded before it is read, parsed strictly, compared
with the digest that names it, and escaped before it enters a message. What a response means is decided by
pure functions in ``protocol``; ``transport`` is the only module that has a socket.
Credentials are sent encrypted or within this machine, to the registry or to the realm that it names.

May import store, manifests, safetensors and core. ``httpx2`` is imported when the first client is made.
"""
