"""The operation ``follow``: keeps a name equal to a tag of another place, or to what a trainer writes."""
