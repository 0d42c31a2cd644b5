"""`python -m shardwright`, which is how torchrun starts a rank, and the command `shardwright`."""

from shardwright.train.launch.ending import telling_of_signals


def main() -> None:
    """Entry point. What a signal does is settled before anything is imported that takes time."""

    def command() -> None:
        from shardwright.cli.main import main as run

        run()

    telling_of_signals(command)


if __name__ == "__main__":
    main()
