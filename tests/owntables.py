"""Tables of actions that a user could write."""

# 1F1B on two ranks, as torch's own class dumps it: empty cells are time that passes.
ONE_F_ONE_B = "0F0,0F1,,0B0,0F2,0B1,0F3,0B2,,0B3\r\n,1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3,\r\n"
# Microbatches in any order, another on each stage, one of them received while another waits; the last stage comes first.
ODD = "1F1,1B1,1F2,1F0,1B0,1B2,1F3,1B3\n0F1,0F2,0F0,0B1,0F3,0B0,0B2,0B3\n"
# Stages in a V, some backward passes in halves.
SPLIT_V = """\
0F0,0F3,3F0,3I0,0F1,3F3,3W0,3I3,0F2,3F1,3B1,0I0,0W0,3W3,0B3,3F2,3I2,0B1,3W2,0I2,0W2
1F0,2F0,1F3,2F3,1F1,2F1,2I0,1I0,2W0,2B3,1F2,2F2,1I3,1W0,2I1,1W3,1B1,2W1,2I2,1I2,1W2,2W2
"""
# All on one rank, the second half first.
ONE_RANK = "0F1,1F1,2F1,3F1,0F0,3B1,1F0,2F0,3F0,2B1,3I0,1B1,0B1,2I0,1B0,3W0,2W0,0B0\n"
