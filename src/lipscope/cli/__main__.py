"""`python -m lipscope.cli`: the command."""

from lipscope.cli import main

if __name__ == "__main__":
    main()
