"""A neighbour: takes SIZE bytes of real memory, says "holding", keeps it until its standard input ends.

Usage: ``neighbour.py SIZE``
"""

import mmap
import sys

size = int(sys.argv[1])
page = b"x" * mmap.PAGESIZE
memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # anonymous memory, not page cache
for at in range(0, size - mmap.PAGESIZE + 1, mmap.PAGESIZE):
    memory[at : at + mmap.PAGESIZE] = page
print("holding", flush=True)
sys.stdin.buffer.read()
