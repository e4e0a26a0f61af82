"""Graph to graph: from a captured model to a step program."""

if __name__ != "gs_compile.passes":
    raise ImportError("import gs_compile.passes: the bare name `passes` is not this package's")
