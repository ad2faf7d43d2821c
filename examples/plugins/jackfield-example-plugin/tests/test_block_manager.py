"""The block manager keeps every law of the conformance suite."""

from jackfield_example.block_manager import StackBlockManager

from jackfield.conformance.block_manager.contract import BlockManagerContract


class TestStackBlockManager(BlockManagerContract):
    manager = StackBlockManager
