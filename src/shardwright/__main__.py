"""`python -m shardwright`, which is how torchrun starts a rank."""

from shardwright.cli import main

main()
