"""Program to program: from the computations of a step to the program that runs."""

if __name__ != "gs_compile.passes":
    raise ImportError("import gs_compile.passes: the bare name `passes` is not this package's")
