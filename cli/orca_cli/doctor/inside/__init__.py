"""Programs that `orca doctor` runs inside pods of the release. Their source is sent; the images need not hold them."""
