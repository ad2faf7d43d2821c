"""The parts of a reproducer that are the same in all of them; they are Python text."""

HEAD = '''"""{title}

Law {law}: {law_title}

Seen: {message}

Run it: the exit status is 1 as long as the fault shows.
"""

{imports}

CONFIG = {config}


def build():
    """A new manager."""
    return {build}

'''

MEMORY = '''
# What the engine's two caches hold: a key stands for its token, all before it, and the salt.
BLOCK = CONFIG.block_size
device, host, requests = {}, {}, {}


def copy(copies, source=device, target=device):
    """Do the copies that a call returned, in their order."""
    for one in copies or ():
        for offset in range(BLOCK):
            target[one.destination, offset] = source.get((one.source, offset))


def admit(name, tokens, salt, allocation):
    """Take note of a request and do its copies; its cached tokens are written already."""
    copy(allocation.copies)
    requests[name] = [tokens, salt, allocation.num_cached_tokens]


def write(name, tokens, end):
    """Compute the tokens of a request up to ``end``."""
    table = manager.block_table(name).tolist()
    salt, start = requests[name][1], requests[name][2]
    for at in range(start, end):
        device[table[at // BLOCK], at % BLOCK] = (salt, tuple(tokens[: at + 1]))
    requests[name] = [tokens, salt, end]


def draft(name, start, end):
    """Write drafts of speculative decoding behind the tokens of a request."""
    table = manager.block_table(name).tolist()
    for at in range(start, end):
        device[table[at // BLOCK], at % BLOCK] = "draft"


def wrong(name):
    """Positions of a request at which its block table leads to a key that is not its own."""
    tokens, salt, end = requests[name]
    table = manager.block_table(name).tolist()
    found = [device.get((table[at // BLOCK], at % BLOCK)) for at in range(end)]
    return [at for at in range(end) if found[at] != (salt, tuple(tokens[: at + 1]))]

'''

STATE = '''
def state(manager):
    """All that can be asked; a manager must not change by it."""
    seen = [manager.usage(), manager.prefix_stats(), manager.largest_request()]
    for tokens, salt in {prompts}:
        keywords = {{"salt": salt}} if salt else {{}}
        seen.append(manager.match_prefix(tokens, **keywords))
        seen.append(manager.can_allocate(tokens, len(tokens), **keywords))
    for name in {names}:
        seen.append(manager.is_swapped(name))
        try:
            seen.append(manager.block_table(name).tolist())
            seen.append(manager.reclaimable(name))
        except KeyError:
            seen.append("no blocks")
    return seen

'''

FILL = '''
def fill(manager):
    """How many device blocks and host blocks a manager without requests can hand out."""
    size = min(CONFIG.block_size, CONFIG.max_model_len)
    blocks, on_host, names = set(), 0, []
    for at in range(CONFIG.num_host_blocks):
        manager.allocate(f"host{at}", [100 + at] * size, size)
        copies = manager.swap_out(f"host{at}")
        if copies is None:
            manager.free(f"host{at}")
            break
        on_host += len(copies)
    while manager.allocate(f"fill{len(names)}", [200 + len(names)] * size, size) is not None:
        names.append(f"fill{len(names)}")
    for name in names:
        for end in range(size, CONFIG.max_model_len + 1, CONFIG.block_size):
            if manager.append(name, end) is None:
                break
        blocks.update(manager.block_table(name).tolist())
    return len(blocks), on_host

'''
