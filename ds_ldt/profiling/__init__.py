"""What a step costs: time, memory, traces, and plans made anew from them."""
