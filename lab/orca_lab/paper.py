"""The numbers and statements of the Orca paper's section 6 that its text has (Yu et al., OSDI 2022).

All numbers of Figure 11, and most of 9 and 10, stand only in the pictures: they are not here, and no table shows them.
`lab` labels of curves are ours: the paper's text names ft(max_bs, mbs) and orca(max_bs) without listing them.
"""

FASTEST_175B = 0.47  # section 6.1: Orca's engine is up to this much faster than FasterTransformer on 175B
OUT_OF_MEMORY = {"13b": 8, "101b": 16}  # section 6.1: FasterTransformer's smallest batch that does not fit
TARGET = 0.190  # s per token, section 6.2: twice the normalized time of orca(128) in Figure 9c
FT_175B, ORCA_175B, RATIO = 0.185, 6.81, 36.9  # req/s at TARGET, section 6.2, and their quotient as printed
FT_PEAK_101B = 0.49  # req/s, section 6.2
BEST_FT = ((1, 1), (8, 8))  # section 6.2: the best (max_bs, mbs)
CELLS = (33, 640)  # section 7: token indexes of distinct cells, 32 + 1 to 512 + 128
