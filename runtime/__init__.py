"""What runs a step program."""

if __name__ != "gs_compile.runtime":
    raise ImportError("import gs_compile.runtime: the bare name `runtime` is not this package's")
