"""``python -m hzplan``."""

from hzplan.cli import main

if __name__ == "__main__":
    main()
