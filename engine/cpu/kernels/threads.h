#pragma once

#include <stdint.h>

typedef void (*Work)(void *context, int64_t item);

// Does the work for each item from 0 on, on all threads, and returns when it is done.
void parallel(Work work, void *context, int64_t items);
