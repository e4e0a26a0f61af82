"""The part that a user touches: backend, optimizers, and models that live on the tiers."""

import sys

from gs_compile.errors import VersionError

if sys.platform != "linux":  # for direct I/O, locks of folders, and what the kernel tells of memory
    raise VersionError(f"training needs Linux, and this is {sys.platform}; on Windows, install it in WSL2")
