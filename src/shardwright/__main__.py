"""`python -m shardwright`, which is how torchrun starts a rank, and the command `shardwright`."""

from shardwright.config.standard_streams import fill_closed_streams
from shardwright.train.launch.ending import ending_at_once, telling_of_signals
from shardwright.train.launch.loading import collect_rarely


def main() -> None:
    """Entry point. It settles the effect of a signal before it imports anything that takes time."""

    def command() -> None:
        from shardwright.cli.main import main as run

        run()

    fill_closed_streams()
    collect_rarely()
    ending_at_once(lambda: telling_of_signals(command))


if __name__ == "__main__":
    main()
