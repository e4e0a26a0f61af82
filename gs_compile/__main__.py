"""``python -m gs_compile`` is the command line ``greedysnake``."""

from gs_compile.cli.main import main

if __name__ == "__main__":
    main()
