"""HTTP clients of registries and of the Hub: requests that are repeated, redirected and authorized with care.

Everything that a server sends is hostile input: it is bounded before it is read, and escaped before it enters a
message. What a response means is decided by pure functions in ``protocol``; ``transport`` is the only module that
has a socket. Credentials are sent encrypted or within this machine, to the server or to the realm that it names.

``httpx2`` is imported when the first client is made.
"""
