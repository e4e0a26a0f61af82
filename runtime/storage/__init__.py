"""storage: files on drives, their checksums, and the commits that name them."""
