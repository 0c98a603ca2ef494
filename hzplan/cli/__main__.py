"""``python -m hzplan.cli``."""

from hzplan.cli import main

if __name__ == "__main__":
    main()
