"""OCI registries as remotes of a store: addresses, requests, credentials, and responses.

The layouts of models there are in ``layouts``. What a registry sends is parsed strictly, and compared with the
digest that names it. Requests are sent by :mod:`blobstore.http`.
"""
