# gdb -batch -x missing_barrier.gdb debug_kernel
# Stops where the checker finds something. The stack is that of the lane that does it: go up to the
# kernel's own frame, and look at its variables; `block().running` is the thread.
set breakpoint pending on
break fulmen::emulator::fail
run
backtrace
frame function reverse
info locals
