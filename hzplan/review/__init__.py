"""Reading what users have: FSDP2 code, DeepSpeed configurations and settings in words, as one setting.

Files are data: code is parsed, never run. From below: ``setting``, what is read; a module per kind of file;
and ``read``, which finds out which kind one is.
"""
