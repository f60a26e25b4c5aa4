"""Files of llama.cpp's format, without torch: their header, and the files of a checkpoint that its fields become."""
