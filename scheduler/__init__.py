"""The scheduler: which request runs where, and when. Pure: `now` is an argument, and it knows no gateway, bill or process.

Its owner, the coordinator or a simulation, tells `scheduler.Scheduler` what happens, and carries out its decisions
(`decisions`). Requests end, are interrupted, and free their room by `cluster.Cluster`, which the rules use, too. Between
the two:

    admit, submit    a request waits in its model's queue (`waiting.queue`) under the key of its KV demand
    decide           `placement.schedule` asks each prefill worker that may find something (`workers.wakeups`) for a step
      compose        `placement.steps`: the fair order (`fairness.fair_queue`) offers requests until the step is full
        decide       run on a pair of workers, wait for a better worker, or no room
          best_side, pair   `placement.pairs`: candidates, filters, and costs in seconds
          room       `kv_admission.admission`: a decode worker has room until the end of every stream it has
        place        `placement.place`: room is taken on both workers
    step_done, handed_over, progress, finished, failed
                     reports of workers: rates are learnt, room comes free, and `workers.wakeups` notes who may be asked again

Why does a request wait? `decide` says it: no turn yet (`fairness`), no room (`kv_admission`, `workers.token_targets`), a
better worker soon (`workers.bindings`), a trial (`workers.trials`), or a pause (`placement.paused_turns`). What ends a
stream before its answer does? `cluster.interrupt`, which only a lost or failed worker, a drain and `placement.preemption`
lead to. A rule about what may run where belongs into `workers.pool` (`decode_fits`, `may_pair`, `decode_candidates`), a cost
into `placement.pairs`, an order of requests into `fairness`.
"""
