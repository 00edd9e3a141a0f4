"""PAT in VeRL: a package that unmodified verl 0.9.1 loads by configuration.

**How it is loaded.** ``plugin.py`` is an entry point of the group ``verl.plugins``, imported by ``import verl`` in each
process; with ``VERL_PLATFORM=cpu`` it registers the CPU platform. ``register.py`` is named by
``actor_rollout_ref.model.external_lib`` and adds rollout backend ``pat`` and, on the CPU, the FSDP2 engine. VeRL hides
what goes wrong in an entry point: ``plugin.py`` prints it, and ``register.py`` raises it where VeRL does not hide it.

**Configuration.** :func:`pat.verl.overrides.overrides` returns the hydra overrides of a GRPO run, and
:func:`pat.verl.overrides.environment` the environment of its processes. Our options lie under
``actor_rollout_ref.rollout.custom.pat``; :class:`pat.verl.settings.PatSettings` lists them. One replica owns all ranks
of a node, so that ``rollout.tensor_model_parallel_size`` is their number, whatever the layouts.

**Arms.** ``policy: static`` stays in ``start`` (with ``layouts: [start]`` as a plain engine without seats),
``thresholds`` switches when fewer than some sequences are alive, ``adaptive`` is PAT: the planner on a step profile and
switch costs from files (:mod:`pat.verl.policies`), and response lengths from a file and from the iterations so far.

**Matched runs.** ``rollout.full_determinism`` makes VeRL name requests by their place in the batch. From it, the
iteration and ``rollout.seed`` follows the seed of each response's sampling, so that tokens do not depend on the layout
or on the order of arrival. ``trace`` forces lengths: a JSON file ``{"lengths": [[...], ...]}`` with a list for each
iteration (beginning anew when used up) of response tokens by place in the batch, prompt by prompt, samples of a prompt
side by side; the response then goes on beyond any end-of-sequence token up to that length.

**Records**, in the directory ``records`` of the settings (one process writes each file, a JSON object a line):

    engine.json      the engine once started: layouts, arguments, ``start_s``, weights of each seat in bytes
    rollouts.jsonl   one line a rollout, see :class:`pat.verl.records.RolloutRecord`: iteration, layouts, time, response
                     lengths, switches (rows of :class:`pat.sglang.record.SwitchRecord`), decisions, and an ``error``
                     where the policy or a switch failed and the rollout went on without
    syncs.jsonl      one line a weight sync, see :class:`pat.verl.records.SyncRecord`
    steps/           the step log, :func:`pat.sglang.step_log.read_steps`; times are time.time(), as in rollouts.jsonl

VeRL's own metrics (``timing_s/*`` and all others) go where its ``file`` logger writes: ``VERL_FILE_LOGGER_PATH``.
"""
