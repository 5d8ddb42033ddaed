// Threads that share the items of one piece of work. They sleep in between.

#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>

static struct {
    pthread_mutex_t user;  // who has work for them
    pthread_mutex_t lock;
    pthread_cond_t begun, done;
    int64_t threads, round, busy, items;
    atomic_int_fast64_t next;
    Work work;
    void *context;
} pool = {.user = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .begun = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER, .threads = 1};

static void run_items(void) {
    for (int64_t item; (item = atomic_fetch_add(&pool.next, 1)) < pool.items;) pool.work(pool.context, item);
}

static void *helper(void *unused) {
    int64_t seen = 0;
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.round == seen) pthread_cond_wait(&pool.begun, &pool.lock);
        seen = pool.round;
        pthread_mutex_unlock(&pool.lock);
        run_items();
        pthread_mutex_lock(&pool.lock);
        if (--pool.busy == 0) pthread_cond_signal(&pool.done);
    }
    return 0;
}

// Starts threads up to this number in all; returns how many there are. For the thread that computes, once.
int64_t start_threads(int64_t threads) {
    for (; pool.threads < threads; pool.threads++) {
        pthread_t made;
        if (pthread_create(&made, 0, helper, 0)) break;
        pthread_detach(made);
    }
    return pool.threads;
}

void parallel(Work work, void *context, int64_t items) {
    if (pool.threads == 1 || items == 1 || pthread_mutex_trylock(&pool.user)) {
        for (int64_t item = 0; item < items; item++) work(context, item);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    pool.work = work, pool.context = context, pool.items = items, pool.busy = pool.threads - 1;
    atomic_store(&pool.next, 0);
    pool.round++;
    pthread_cond_broadcast(&pool.begun);
    pthread_mutex_unlock(&pool.lock);
    run_items();
    pthread_mutex_lock(&pool.lock);
    while (pool.busy) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.user);
}
