"""The systems that the paper compares with: request-level scheduling as of Triton, and BatchMaker's cells."""
