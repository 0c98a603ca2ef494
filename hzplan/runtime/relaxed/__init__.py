"""Groups that train by themselves and exchange parameters without waiting (``core.relaxed``)."""
