"""All servers by name, and all tools by full name."""

from experiments.exp_7_16_aworld.servers import code, desk, library, media, office, web
from experiments.exp_7_16_aworld.tool import Server, Tool

SERVERS: dict[str, Server] = {
    server.name: server
    for server in (
        *(web.search, web.browser, web.archive),
        *(library.encyclopaedia, library.papers),
        *(office.tables, office.documents),
        *(media.images, media.audio),
        code.shell,
        *(desk.calculator, desk.memory, desk.calendar),
    )
}
TOOLS: dict[str, Tool] = {tool.full: tool for server in SERVERS.values() for tool in server.tools.values()}
