"""The plugin: which names stand for which classes. It imports none of them."""

from jackfield import Register, hookimpl

JACKFIELD_API_VERSION = "1.0"


@hookimpl
def jackfield_attention_backends(register: Register) -> None:
    """One attention backend."""
    register("example_loop", "jackfield_example.attention:LoopBackend")


@hookimpl
def jackfield_scheduling_policies(register: Register) -> None:
    """One scheduling policy."""
    register("example_shortest_prompt", "jackfield_example.policy:ShortestPromptPolicy")


@hookimpl
def jackfield_block_managers(register: Register) -> None:
    """One block manager."""
    register("example_stack", "jackfield_example.block_manager:StackBlockManager")
