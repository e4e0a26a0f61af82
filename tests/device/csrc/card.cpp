// The whole card as one unit of translation: each would read torch's headers again, which takes longer than the rest.
#include "fallback.cpp"
#include "memory.cpp"
#include "module.cpp"
#include "operators.cpp"
#include "pinned.cpp"
#include "random.cpp"
#include "streams.cpp"
