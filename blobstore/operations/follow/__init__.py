"""The operation ``follow``: keeps a name equal to what another place has under a tag, or what a trainer writes."""
