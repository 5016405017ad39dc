// Ends in a fault, on purpose: what a GPU that breaks down does to a program is tested with it.
extern "C" __global__ void trap_now() { asm volatile("trap;"); }
