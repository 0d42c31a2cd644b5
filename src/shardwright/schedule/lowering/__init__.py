"""From compute actions to a program: messages, gathers, reductions, recomputation."""
