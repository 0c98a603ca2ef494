"""How ranks come to be: the job that a process is part of, and ranks started on this machine."""
