"""One step, explained: the contents of each device, each operator, each link."""

from shardwright.config.package_call import refuse_calls

refuse_calls(__name__)
